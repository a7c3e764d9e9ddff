"""Private estimators in the conventions of scikit-learn."""

from .._extras import missing

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        missing("dpbilevel.sklearn", "sklearn", extra="sklearn")
    ) from error

from .fair import FairClassifier
from .logistic import DPLogisticRegression
from .network import DPMLPClassifier
from .ridge import DPRidge
from .sources import DPSourceReweighting

__all__ = [
    "DPLogisticRegression",
    "DPMLPClassifier",
    "DPRidge",
    "DPSourceReweighting",
    "FairClassifier",
]
