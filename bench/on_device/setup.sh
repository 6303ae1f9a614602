# Source this in the repository's folder on a machine with a GPU: . bench/on_device/setup.sh ARCHIVE...
# It unpacks the archives of `python -m bench on_device wheels` outside of the repository, and makes the pair
# while Ray starts. Later commands in this shell find both.
SITE=${SITE:-/tmp/site}
PAIR=${PAIR:-/tmp/pair}
mkdir -p "$SITE"
for archive in "$@"; do python3 -m tarfile -e "$archive" "$SITE"; done
export PYTHONPATH="$SITE:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
[ -e "$PAIR" ] || setsid python3 -m bench on_device pair "$PAIR" &
if [ -e "$SITE/ray" ]; then python3 -m bench on_device service --parts masks --out "${OUT:-.}"; fi
wait
