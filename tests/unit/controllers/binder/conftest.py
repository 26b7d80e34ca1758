"""Claims, volumes and classes, written shortly."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
