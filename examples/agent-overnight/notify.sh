#!/bin/sh
# Gets the event as JSON on stdin: waiting_for_input, crashed, halted or hung.
cat >> events.log
echo >> events.log
