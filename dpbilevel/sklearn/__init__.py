"""Private estimators in the conventions of scikit-learn."""

from .._extras import missing, public_names

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        missing("dpbilevel.sklearn", "sklearn", extra="sklearn")
    ) from error

from .fair import FairClassifier as FairClassifier
from .logistic import DPLogisticRegression as DPLogisticRegression
from .network import DPMLPClassifier as DPMLPClassifier
from .ridge import DPRidge as DPRidge
from .sources import DPSourceReweighting as DPSourceReweighting

__all__ = public_names(globals())
