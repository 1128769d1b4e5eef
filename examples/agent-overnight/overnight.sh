#!/bin/sh
# Sends each task to an agent in the background: see README.md.
set -eu
cd "$(dirname "$0")"
session=${SESSION:-night}
turn=${TURN:-2h} # how long one task may take

outlast run -d --session "$session" --notify ./notify.sh -- "${AGENT:-claude}"
outlast wait-for "$session" --prompt --timeout 2m

while read -r task; do
    outlast send "$session" "$task" --submit --timeout 2m
    outlast wait-for "$session" --prompt --timeout "$turn"
done < tasks.txt

outlast screen "$session" --history 1000 > screen.txt
outlast stop "$session"
