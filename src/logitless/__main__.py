"""`python -m logitless`: the command line."""

from .cli.main import main

raise SystemExit(main())
