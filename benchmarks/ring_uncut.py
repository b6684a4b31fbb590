"""Our uncut loop against transformers' generate.

python benchmarks/ring_uncut.py [MODEL] [options of splitlm bench ring]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "ring", "--only", "uncut", *sys.argv[1:]]
main()
