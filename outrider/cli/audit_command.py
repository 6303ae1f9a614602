"""``outrider audit RECEIPT...``: whether answers are what their receipts say, computed again."""

import argparse
from pathlib import Path

from outrider.cli.json_output import add_json, print_or_write
from outrider.cli.service import exit_code

HONEST, DIFFERS, UNKNOWN = 0, 1, 2  # exit codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit codes: 0 all are honest, 1 an answer differs, 2 it could not be known"
    parser.add_argument("receipts", metavar="RECEIPT", nargs="+", type=Path, help="file with a receipt, JSON")
    parser.add_argument(
        "--model", required=True, metavar="FOLDER", help="checkpoint that should have answered, or its hub id"
    )
    parser.add_argument("--adapter", metavar="FOLDER", help="adapter that should have answered")
    parser.add_argument(
        "--public-key",
        type=Path,
        metavar="FILE",
        help="PEM file of the deployment's key; without it a receipt's own key is believed",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="NATS",
        help="margin that counts as rounding, before temperature [0.001, and 0.4 in 16 bit without"
        " batch-invariant numerics]",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from workshop.auditing.audit import AuditError

    return exit_code(lambda: _audit(options), (AuditError, OSError), UNKNOWN)


def _audit(options: argparse.Namespace) -> int:
    from workshop.auditing.audit import ReceiptAuditor, read_key, read_receipt

    receipts = [(str(file), read_receipt(file)) for file in options.receipts]
    key = None if options.public_key is None else read_key(options.public_key)
    auditor = ReceiptAuditor(options.model, key, options.tolerance, options.adapter)
    # Receipts are sorted by numerics, so that the model is loaded once for all receipts with equal numerics.
    receipts.sort(key=lambda named: named[1].numerics.model_dump_json())
    audited = [auditor.audit(name, receipt) for name, receipt in receipts]
    text = "\n".join(each.line for each in audited)
    print_or_write(text, [each.as_json() for each in audited], options.json)
    return DIFFERS if any(each.reasons for each in audited) else HONEST
