//! These need `bwrap` and `/usr/bin/python3`.

use super::*;

fn options() -> Options {
    Options {
        wall_seconds: 60,
        cpu_seconds: 60,
        ..Options::default()
    }
}

async fn grade_with(source: &str, text: &str, options: Options) -> Result<f64, Error> {
    let sample = Sample {
        rollout: uuid::Uuid::nil(),
        id: "7",
        prompt: "Write a function `add`.",
        answer: "3",
        text,
    };
    grade(source, &Sandboxes::new(options), &sample).await
}

/// Calls the completion's function in a process of its own, and compares the results here: as in the guide.
const RUNS_TESTS: &str = r#"
import json, subprocess, sys

CASES = [([1, 2], 3), ([-1, 1], 0)]
CALLS = "import json, sys; from solution import add; print(json.dumps([add(*c) for c in json.load(sys.stdin)]))"

def grade(sample, item):
    open("solution.py", "w").write(sample["output_text"])
    calls = json.dumps([arguments for arguments, _ in CASES])
    run = subprocess.run([sys.executable, "-c", CALLS], input=calls, capture_output=True, text=True)
    try:
        return float(json.loads(run.stdout) == [result for _, result in CASES])
    except ValueError:
        return 0.0
"#;

#[tokio::test]
async fn a_completion_is_graded_by_running_tests_on_it() {
    let right = grade_with(RUNS_TESTS, "def add(a, b):\n    return a + b\n", options()).await;
    assert_eq!(right, Ok(1.0));
    for wrong in [
        "def add(a, b):\n    return a - b\n",
        "def add(a, b",
        "",
        "raise SystemExit(0)",
        "import os\nprint('passed'); os._exit(0)",
        // what would know the results
        "import os\nopen('grader.py'); print('[3, 0]', flush=True); os._exit(0)",
        "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb'); print('[3, 0]', flush=True); os._exit(0)",
    ] {
        assert_eq!(grade_with(RUNS_TESTS, wrong, options()).await, Ok(0.0), "{wrong}");
    }
    let short = Options {
        wall_seconds: 2,
        ..options()
    };
    let endless = grade_with(RUNS_TESTS, "while True: pass", short).await.unwrap_err();
    assert_eq!(
        (endless.cause.code(), endless.reason.contains("wall_seconds = 2")),
        ("grade_limit", true)
    );
}

#[tokio::test]
async fn a_grader_sees_the_sample_and_the_item() {
    let source = "def grade(sample, item):\n    print('noise')\n    \
        return sample['output_json']['sum'] == int(item['answer']) and len(item['prompt']) / len(item['id'])";
    assert_eq!(grade_with(source, "{\"sum\": 3}", options()).await, Ok(23.0));
    let missing = grade_with(source, "no JSON", options()).await.unwrap_err();
    assert_eq!(
        missing.to_string(),
        "the python grader failed: it raised KeyError in line 3"
    );
}

#[tokio::test]
async fn what_is_no_grade_is_an_error_with_a_code_and_never_0() {
    let body = |line: &str| format!("def grade(sample, item):\n    {line}\n");
    for (source, code, reason) in [
        (body("return None"), "grade_invalid", "NoneType"),
        (body("return '1'"), "grade_invalid", "str"),
        (body("return float('nan')"), "grade_invalid", "nan"),
        (body("return 10 ** 400"), "grade_broke", "OverflowError"),
        (
            body("raise ValueError(sample['output_text'])"),
            "grade_broke",
            "ValueError in line 2",
        ),
        (body("raise SystemExit(0)"), "grade_broke", "SystemExit"),
        (body("import os; os._exit(0)"), "grade_broke", "without a grade"),
        (body("import os; os._exit(3)"), "grade_broke", "status 3"),
        (body("import os; os.kill(os.getpid(), 9)"), "grade_broke", "status 137"),
        (
            body("x = []\n    while True: x.append(b'x' * (1 << 20))"),
            "grade_limit",
            "memory_mebibytes",
        ),
        (
            body("import os\n    while True: os.write(2, b'x' * 1000)"),
            "grade_limit",
            "64 KiB",
        ),
        ("def grade(sample, item)\n".to_owned(), "grade_failed", "SyntaxError"),
    ] {
        let error = grade_with(&source, "the completion", options()).await.unwrap_err();
        assert_eq!(error.cause.code(), code, "{source} {error}");
        assert!(
            error.reason.contains(reason) && !error.reason.contains("completion"),
            "{source} {error}"
        );
    }
}

#[test]
fn a_source_without_the_function_is_refused() {
    assert!(
        check("def score(sample, item): return 1")
            .unwrap_err()
            .contains("def grade(")
    );
    assert!(check(&format!("def grade(s, i): pass{}", "#".repeat(SOURCE_BYTES))).is_err());
    assert_eq!(check(RUNS_TESTS), Ok(()));
}

#[test]
fn limits_with_which_nothing_runs_are_refused() {
    let memory = Options {
        memory_mebibytes: 1,
        ..options()
    };
    assert!(
        memory
            .check_ranges("")
            .unwrap_err()
            .to_string()
            .starts_with("memory_mebibytes")
    );
    let none = Options {
        at_a_time: 0,
        ..options()
    };
    assert!(none.check_ranges("").unwrap_err().to_string().starts_with("at_a_time"));
    assert_eq!(options().check_ranges(""), Ok(()));
}
