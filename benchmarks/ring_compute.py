"""An engine against transformers, uncut, cut and in batches: fast, where no other one is named.

python benchmarks/ring_compute.py [MODEL] [--compute ENGINE] [options of splitlm bench ring]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "ring", "--compute", "fast", *sys.argv[1:]]
main()
