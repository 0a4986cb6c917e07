"""What SGLang makes of the settings it is given, worked out before it starts.

from pdtransfer.contract.effective import effective, effective_values
result = effective(facts, geometry, accelerator)
result.facts     # as the engine will really run; None is not known yet
result.rewrites  # what it changes or chooses by itself, and why
effective_values(facts)  # the same as a flat dictionary, for people
"""

from pdtransfer.contract.effective.engine import effective
from pdtransfer.contract.effective.rewrite import Effective, Rewrite
from pdtransfer.contract.effective.shown import effective_values

__all__ = ["Effective", "Rewrite", "effective", "effective_values"]
