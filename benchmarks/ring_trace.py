"""What tracing costs.

python benchmarks/ring_trace.py [MODEL] [options of splitlm bench ring]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "ring", "--only", "trace", *sys.argv[1:]]
main()
