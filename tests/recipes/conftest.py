"""The quickstart's modules are scripts beside their recipe, not a package."""

import sys

from tests.support.processes import ROOT

sys.path.insert(0, str(ROOT / "recipes/quickstart"))
