"""Write the README's performance table anew, between its marks, from results of ``splitlm bench --json``.

python benchmarks/readme/table.py RESULT.json...
"""

import sys
from pathlib import Path

from splitlm.bench.publish import block, load, replace
from splitlm.core.errors import SplitlmError

readme = Path(__file__).resolve().parents[2] / "README.md"
try:
    text = replace(readme.read_text(encoding="utf-8"), block([load(Path(name)) for name in sys.argv[1:]]), str(readme))
except SplitlmError as error:
    sys.exit(f"table: {error}")
readme.write_text(text, encoding="utf-8")
