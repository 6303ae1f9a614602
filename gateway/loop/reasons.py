"""Why a Draft is as deep as it is, or there is none, beside what the pace says."""

OFF, FIXED, LATE, LOST, LAST_TOKEN = "off", "fixed", "late Draft", "lost draft worker", "last token"
EMPTY = "empty Drafts"
FIRST_TOKEN, LOST_TARGET = "first token", "lost target worker"  # in traces
NAMED, FIRST, MEASURED = "named", "first", "measured"  # why a drafter drafts; LOST: in place of a lost one
ROLLED_OUT, WENT_BACK = "rolled out", "went back"  # the same of a new draft, and of what drafts in its place
OF_ENGINE, OF_LOSSES = "engine", "lost targets"  # of failures
