"""`python -m logitless.cli`, for launchers such as torchrun."""

from .main import main

raise SystemExit(main())
