"""`python -m docs.tables`."""

import sys

from docs.tables.pages import main

sys.exit(main())
