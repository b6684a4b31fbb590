"""Windows in which nothing moves against no windows, and the barrier between them.

python benchmarks/migrate_windows.py [MODEL] [options of splitlm bench migrate]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "migrate", "--only", "windows", *sys.argv[1:]]
main()
