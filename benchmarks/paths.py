"""Places of the repository and of the census records."""

import os
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
ADULT = pathlib.Path(os.environ.get("ADULT", ROOT / "../shared/data/adult.csv"))
