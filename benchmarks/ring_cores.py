"""Two stages on a core each: two sessions against one.

python benchmarks/ring_cores.py [MODEL] [options of splitlm bench ring]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "ring", "--only", "cores", *sys.argv[1:]]
main()
