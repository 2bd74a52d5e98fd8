"""How often each row is looked up, and which rows that makes hot. No process group here.

Shape letters: N lookups, U rows seen, H hot rows.
"""

from torchrec_picasso.frequency.counts import ModelTable, TableCounts
from torchrec_picasso.frequency.hot_set import select_hot_rows
from torchrec_picasso.frequency.spectrum import CountSpectrum
from torchrec_picasso.frequency.stats import FrequencyStats

__all__ = ["CountSpectrum", "FrequencyStats", "ModelTable", "TableCounts", "select_hot_rows"]
