"""`python -m convpar`: the command line."""

import sys

from convpar.cli import main

if __name__ == "__main__":
    sys.exit(main())
