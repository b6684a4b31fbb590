"""One stream through a ring of three against the uncut model, and the hops in it.

python benchmarks/ring_stream.py [MODEL] [options of splitlm bench ring]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "ring", "--only", "stream", *sys.argv[1:]]
main()
