"""`python -m onefold.cli`."""

import sys

from onefold.cli.main import main

sys.exit(main())
