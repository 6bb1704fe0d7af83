# A stack of an older release, then this build on its state with a replica of that release beside it. OLD=FOLDER, where
# both archives of the release are unpacked; SECONDS_EACH=60
need stack
python3 tools/upgrade.py --old "$OLD/bin/springtide" --springtide "$springtide" --base $model --cache .stack \
  --work .springtide/upgrade --seconds "${SECONDS_EACH:-60}"
