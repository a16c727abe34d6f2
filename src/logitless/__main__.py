"""`python -m logitless`: the command line where its script is not on the path."""

from .cli.main import main

raise SystemExit(main())
