"""Executes plans (executor: windows, deadlines, settling) and keeps destination pages (ledger)."""
