"""`python -m thinwire` is `thinwire`."""

import sys

from .cli import main

sys.exit(main())
