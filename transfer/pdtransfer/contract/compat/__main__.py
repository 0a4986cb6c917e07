"""Prints the rules as a Markdown table."""

from pdtransfer.contract.compat.table import rules_table

if __name__ == "__main__":
    print(rules_table(), end="")
