"""`python -m thinwire` is `thinwire`."""

import sys

from .lab.cli import main

sys.exit(main())
