"""Train negotiators by self-play: `accelerate launch recipes/negotiation.py [options]` (--help explains them)."""

import sys

from bupo.cli import run_negotiation

if __name__ == "__main__":
    sys.exit(run_negotiation(sys.argv[1:], prog="negotiation.py"))
