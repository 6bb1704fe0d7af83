import ctypes
import json
import math
import os
import sys
import traceback

# No program that the grader starts reads this one's memory, where the right answers are.
PR_SET_DUMPABLE = 4
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
given = json.loads(sys.stdin.buffer.read())
# What the grader prints goes to standard error. Programs that it starts do not inherit `answer`.
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
asked = False
try:
    names = {"__name__": "grader", "__file__": "grader.py"}
    with open("grader.py", encoding="utf-8") as file:
        source = file.read()
    os.unlink("grader.py")
    exec(compile(source, "grader.py", "exec"), names)
    asked = True
    reward = names["grade"](given["sample"], given["item"])
    if isinstance(reward, (int, float)) and math.isfinite(reward):
        said = {"reward": float(reward)}
    else:
        said = {"no_number": "nan or inf" if isinstance(reward, float) else type(reward).__name__}
except BaseException as error:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "grader.py"]
    said = {"raised" if asked else "not_loaded": type(error).__name__ + (f" in line {lines[-1]}" if lines else "")}
json.dump(said, answer)
answer.flush()
os._exit(0)  # threads of the grader do not hold it up
