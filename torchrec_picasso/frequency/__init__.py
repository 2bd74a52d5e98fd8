"""Lookup counts of embedding rows, and the selection of hot rows by count; no communication.

``stats`` is what a user calls; ``collect`` reads ids, ``counts`` counts them in bounded memory,
``spectrum`` estimates from the counts, ``hot_set`` selects, ``parquet`` is the file.
"""

from torchrec_picasso.frequency.counts import ModelTable, TableCounts
from torchrec_picasso.frequency.hot_set import select_hot_rows
from torchrec_picasso.frequency.spectrum import CountSpectrum
from torchrec_picasso.frequency.stats import FrequencyStats

__all__ = ["CountSpectrum", "FrequencyStats", "ModelTable", "TableCounts", "select_hot_rows"]
