"""What every test shares."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `support` is a package of the tests alone

# A shell that runs the suite in the background has it ignore Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
