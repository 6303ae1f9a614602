# To be sourced from the repository's folder on a machine with a GPU: . bench/on_device/setup.sh ARCHIVE...
# Unpacks what `python -m bench.on_device.wheels` packed, outside of the repository, and makes the pair while
# Ray starts. Commands that follow find both.
SITE=/tmp/site
PAIR=/tmp/pair
mkdir -p "$SITE"
for archive in "$@"; do python3 -m tarfile -e "$archive" "$SITE"; done
export PYTHONPATH="$SITE:$PWD" PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
df -h /tmp /dev/shm
[ -e "$PAIR" ] || setsid python3 -m bench.on_device.pair "$PAIR" ${DEVICE:+--device "$DEVICE"} &
if [ -e "$SITE/ray" ]; then python3 -m bench.on_device.service --parts masks --out "${OUT:-.}"; fi
wait
