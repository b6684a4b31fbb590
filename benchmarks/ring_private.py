"""What it costs to keep norm and head at home.

python benchmarks/ring_private.py [MODEL] [options of splitlm bench ring]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "ring", "--only", "private", *sys.argv[1:]]
main()
