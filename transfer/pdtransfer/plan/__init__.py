"""Which bytes go where: pure decisions from two rank layouts and page lists; the mover takes none."""

from pdtransfer.plan.blocks import Block, block_count, blocks
from pdtransfer.plan.explicit import MAX_PIECE, Descriptors, Segment, TransferPlan, plan
from pdtransfer.plan.lanes import Lane, PairPlan, Side, Strategy, check_pair, pair_plan
from pdtransfer.plan.pages import PageArray, PageList, check_pages
from pdtransfer.plan.rows import RowCopy, RowGroup, RowMap, row_map
from pdtransfer.plan.tables import (
    page_indices,
    pages_table,
    slice_indices,
    slices_table,
    unit_indices,
    units_table,
)

__all__ = [
    "MAX_PIECE",
    "Block",
    "Descriptors",
    "Lane",
    "PageArray",
    "PageList",
    "PairPlan",
    "RowCopy",
    "RowGroup",
    "RowMap",
    "Segment",
    "Side",
    "Strategy",
    "TransferPlan",
    "block_count",
    "blocks",
    "check_pages",
    "check_pair",
    "page_indices",
    "pages_table",
    "pair_plan",
    "plan",
    "row_map",
    "slice_indices",
    "slices_table",
    "unit_indices",
    "units_table",
]
