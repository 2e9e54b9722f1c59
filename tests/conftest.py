"""What every test shares."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `support` is a package of the tests alone
