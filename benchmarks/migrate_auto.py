"""A stage is slow, and the ring moves its blocks by itself.

python benchmarks/migrate_auto.py [MODEL] [options of splitlm bench migrate]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "migrate", "--only", "auto", *sys.argv[1:]]
main()
