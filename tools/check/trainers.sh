# The torch losses of examples/trainers beside the golden vectors, into .springtide/trainers-venv (6 GB).
tools/trainers-venv.sh .springtide/trainers-venv
(cd examples/trainers && "$OLDPWD/.springtide/trainers-venv/bin/python" -m pytest -q -p no:cacheprovider test_losses.py)
