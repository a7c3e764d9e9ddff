"""dp-accounting, imported when it is first used.

With the parts of SciPy that it imports it takes longer to import than JAX. SciPy needs
nothing of the kind: `import scipy` imports its parts when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import dp_accounting as dp_accounting
else:

    class _DpAccounting:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("dp_accounting"), name)

    dp_accounting = _DpAccounting()
