"""Fit of a prefill and a decode role: each rule once, for every caller.

from pdtransfer.contract.compat import check
report = check(prefill_facts, decode_facts)       # before launch, from a spec
report = check_cards(prefill_cards, decode_cards)  # from what the engines really run
report = check_rank_pair(prefill_card, decode_card)  # in the pods, at the handshake
report.verdict, report.first_failure
"""

from pdtransfer.contract.compat.cards import check_cards, check_rank_pair
from pdtransfer.contract.compat.checker import RULES, check
from pdtransfer.contract.compat.observed import facts_from_cards
from pdtransfer.contract.compat.report import Finding, Report, Status
from pdtransfer.contract.compat.rule import Outcome, Rule
from pdtransfer.contract.compat.table import rules_table

__all__ = [
    "RULES",
    "Finding",
    "Outcome",
    "Report",
    "Rule",
    "Status",
    "check",
    "check_cards",
    "check_rank_pair",
    "facts_from_cards",
    "rules_table",
]
