use crate::*;
use world::Ended;
use world::process::Error;

#[tokio::test]
async fn a_program_reads_its_input_and_its_files_and_leaves_output_and_status() {
    let source = "import sys\nprint(sys.stdin.read() + open('a/b.txt').read() + open('c').read())\n\
        print('gone', file=sys.stderr)\nopen('new', 'w').write('x')\nsys.exit(7)";
    let mut command = python(source, patient());
    command.stdin = b"in ".to_vec();
    command.files = [("a/b.txt", "file "), ("c", "other")]
        .map(|(path, text)| (path.into(), text.into()))
        .into();
    let output = SANDBOX.run(&command).await.unwrap();
    assert_eq!(output.ended, Ended::Exited(7), "{}", text(&output.stderr));
    assert_eq!(
        (text(&output.stdout), text(&output.stderr)),
        ("in file other\n".into(), "gone\n".into())
    );
}

#[tokio::test]
async fn a_program_may_use_processes_threads_and_locks_of_its_own() {
    let source = "import multiprocessing, subprocess, tempfile, threading\n\
        multiprocessing.set_start_method('fork')\n\
        with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, -2]))\n\
        print(subprocess.run(['sh', '-c', 'echo shell | cat'], capture_output=True, text=True).stdout)\n\
        t = threading.Thread(target=lambda: tempfile.TemporaryFile().write(b'x')); t.start(); t.join()";
    let output = run(source, patient()).await;
    assert_eq!(output.ended, Ended::Exited(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "[1, 2]\nshell\n\n");
}

#[tokio::test]
async fn an_exit_status_is_what_the_program_said_or_128_and_the_signal_that_ended_it() {
    let output = run("import os; os.kill(os.getpid(), 11)", patient()).await;
    assert_eq!(output.ended, Ended::Exited(139));
    for status in [130, 192, 255] {
        let output = run(&format!("import os; os._exit({status})"), patient()).await;
        assert_eq!(output.ended, Ended::Exited(status));
    }
}

#[tokio::test]
async fn a_program_that_is_not_there_ends_with_127_as_in_a_shell() {
    let command = Command {
        program: vec!["no-such-program".into()],
        limits: patient(),
        ..Command::default()
    };
    let output = SANDBOX.run(&command).await.unwrap();
    assert_eq!(output.ended, Ended::Exited(127));
    assert!(
        text(&output.stderr).contains("no-such-program"),
        "{}",
        text(&output.stderr)
    );
}

#[tokio::test]
async fn what_one_program_writes_no_other_one_sees() {
    let source = "import os; print(os.listdir('/tmp'), os.listdir('.'), os.listdir('/dev/shm'));\
        [open(path, 'w') for path in ['/tmp/a', 'b', '/dev/shm/c']]";
    for _ in 0..2 {
        assert_eq!(text(&run(source, patient()).await.stdout), "['work'] [] []\n");
    }
}

#[tokio::test]
async fn more_programs_than_are_run_at_a_time_wait_for_their_turn() {
    let sandbox = Sandbox::new(1).unwrap();
    let command = python("import time; time.sleep(0.2)", patient());
    let start = Instant::now();
    let (first, second) = tokio::join!(sandbox.run(&command), sandbox.run(&command));
    assert!(start.elapsed() >= Duration::from_millis(400));
    assert_eq!(
        (first.unwrap().ended, second.unwrap().ended),
        (Ended::Exited(0), Ended::Exited(0))
    );
}

#[tokio::test]
async fn a_sandbox_that_cannot_be_made_is_an_error_that_says_why() {
    // bwrap refuses a file system in memory of no size
    let limits = Limits {
        memory_bytes: 0,
        ..patient()
    };
    let refused = SANDBOX.run(&python("pass", limits)).await.unwrap_err();
    assert!(matches!(refused, Error::Refused(_)), "{refused}");
    assert!(refused.to_string().contains("user namespaces"), "{refused}");
}
