use crate::*;
use world::{Ended, Limit};

const MEBIBYTE: u64 = 1 << 20;

/// Runs a program that never ends by itself, and checks that this limit ends it and nothing is left.
async fn ends_by(limit: Limit, source: &str, limits: Limits) -> Output {
    let marker = format!(
        "# {}",
        tempfile::Builder::new()
            .prefix("marker")
            .tempfile()
            .unwrap()
            .path()
            .display()
    );
    let output = run(&format!("{source}\n{marker}"), limits).await;
    assert_eq!(
        output.ended,
        Ended::Exceeded(limit),
        "{source}\n{}",
        text(&output.stderr)
    );
    assert!(output.wall < PATIENCE / 2, "{:?}", output.wall);
    none_left(&marker).await;
    output
}

fn short() -> Limits {
    Limits {
        wall: Duration::from_secs(2),
        ..patient()
    }
}

#[tokio::test]
async fn a_program_that_sleeps_for_ever_ends_by_the_wall_clock() {
    for source in [
        "import time; time.sleep(1e6)",
        "import signal, time\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\ntime.sleep(1e6)",
        "import os, time\n[os.close(fd) for fd in (0, 1, 2)]\ntime.sleep(1e6)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import os, time\nos.setpgid(0, 0); os.fork(); time.sleep(1e6)",
    ] {
        ends_by(Limit::Wall, source, short()).await;
    }
}

#[tokio::test]
async fn a_program_that_does_not_read_its_input_ends_by_the_wall_clock() {
    let mut command = python("import time; time.sleep(1e6)", short());
    command.stdin = vec![b'x'; 4 << 20];
    assert_eq!(SANDBOX.run(&command).await.unwrap().ended, Ended::Exceeded(Limit::Wall));
}

#[tokio::test]
async fn a_fork_bomb_makes_no_more_processes_than_allowed_and_ends() {
    let limits = Limits {
        processes: 8,
        ..short()
    };
    let output = ends_by(
        Limit::Wall,
        "import os, sys, time\nwhile True:\n try:\n  os.fork(); os.write(1, b'.')\n except OSError: time.sleep(0.1)",
        limits,
    )
    .await;
    let forked = output.stdout.len();
    assert!((2..=16).contains(&forked), "{forked} returns of fork"); // each of 7 forks returns twice
}

#[tokio::test]
async fn a_fork_bomb_that_does_not_rest_ends_too() {
    let limits = Limits {
        processes: 8,
        cpu: Duration::from_secs(1),
        ..patient()
    };
    ends_by(
        Limit::Cpu,
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
        limits,
    )
    .await;
}

#[tokio::test]
async fn threads_count_as_processes() {
    let source = "import threading, time\nn = 0\ntry:\n while True:\n  \
        threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start(); n += 1\n\
        except RuntimeError: print(n, flush=True)\nimport os; os._exit(0)";
    let output = run(
        source,
        Limits {
            processes: 8,
            ..patient()
        },
    )
    .await;
    assert_eq!(text(&output.stdout), "7\n", "{}", text(&output.stderr));
}

#[tokio::test]
async fn memory_is_that_of_all_processes_and_files() {
    let fill = "import os, time\ndef fill(write):\n try:\n  while True: write(b'x' * (1 << 20))\n \
        except Exception: time.sleep(1e6)\n"; // what it has counts at the next reading
    for bomb in [
        "kept = []\nfill(kept.append)",
        // less for each process than one may have
        "for _ in range(6): os.fork() or (globals().update(kept=b'x' * (16 << 20)), time.sleep(1e6))\ntime.sleep(1e6)",
        "import mmap\nfill(mmap.mmap(-1, 1 << 30).write)",
        "fill(open('big', 'wb', 0).write)",
        "fill(open('/tmp/other', 'wb', 0).write)",
        "fill(lambda _: open(f'/tmp/{time.monotonic_ns()}', 'w').close())",
        // deleted files that are held open
        "f = open('/tmp/big', 'wb', 0)\nos.unlink('/tmp/big')\nfill(f.write)",
    ] {
        let limits = Limits {
            memory_bytes: 64 * MEBIBYTE,
            ..patient()
        };
        ends_by(Limit::Memory, &format!("{fill}{bomb}"), limits).await;
    }
}

#[tokio::test]
async fn memory_that_no_limit_counts_cannot_be_had() {
    let source = "import os, ctypes\n\
        try: os.memfd_create('x'); print('memfd')\n\
        except OSError: pass\n\
        try: bytearray(8 << 30); print('allocated')\n\
        except MemoryError: pass\n\
        try:\n f = open('/dev/shm/x', 'wb', 0)\n for _ in range(64): f.write(b'x' * (1 << 20))\n print('shm')\n\
        except OSError: pass\n\
        try: open('/dev/x', 'w'); print('dev')\n\
        except OSError: pass";
    let limits = Limits {
        memory_bytes: 128 * MEBIBYTE,
        ..patient()
    };
    let output = run(source, limits).await;
    assert_eq!(
        (output.ended, text(&output.stdout)),
        (Ended::Exited(0), String::new()),
        "{}",
        text(&output.stderr)
    );
}

#[tokio::test]
async fn pages_that_processes_share_count_once() {
    let source = "import os\nkept = b'x' * (40 << 20)\nends = [os.pipe() for _ in range(4)]\n\
        for r, w in ends:\n if not os.fork(): os.close(w); os.read(r, 1); os._exit(0)\n\
        import time; time.sleep(0.5)\nprint('kept')";
    let limits = Limits {
        memory_bytes: 128 * MEBIBYTE,
        ..patient()
    };
    let output = run(source, limits).await;
    assert_eq!(
        (output.ended, text(&output.stdout)),
        (Ended::Exited(0), "kept\n".into()),
        "{}",
        text(&output.stderr)
    );
}

#[tokio::test]
async fn processor_time_is_that_of_all_processes() {
    for burn in [
        "while True: pass",
        "import os; os.fork()\nwhile True: pass",
        // children whose time the kernel does not add to their parent's
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n r, w = os.pipe()\n \
         if not os.fork():\n  end = time.process_time() + 0.1\n  while time.process_time() < end: pass\n  os._exit(0)\n \
         os.close(w); os.read(r, 1); os.close(r)",
    ] {
        let limits = Limits {
            cpu: Duration::from_secs(1),
            ..patient()
        };
        let output = ends_by(Limit::Cpu, burn, limits).await;
        assert!(output.wall >= Duration::from_millis(400), "{:?}", output.wall);
    }
}

#[tokio::test]
async fn output_ends_at_its_limit() {
    for (stream, other) in [(1, 2), (2, 1)] {
        let source = format!("import os\nos.write({other}, b'few')\nwhile True: os.write({stream}, b'x' * 5000)");
        let limits = Limits {
            output_bytes: 10_000,
            ..patient()
        };
        let output = ends_by(Limit::Output, &source, limits).await;
        let mut lengths = [output.stdout.len(), output.stderr.len()];
        lengths.sort_unstable();
        assert!(lengths[0] <= 3 && lengths[1] == 10_000, "{lengths:?}");
    }
    let limits = Limits {
        output_bytes: 3,
        ..patient()
    };
    let output = run("print('ab')", limits).await;
    assert_eq!((output.ended, text(&output.stdout)), (Ended::Exited(0), "ab\n".into()));
}

#[tokio::test]
async fn nothing_is_left_of_a_program_that_puts_itself_in_the_background() {
    let marker = format!("marker-{}-daemon", std::process::id());
    for daemon in [
        "os.fork() and os._exit(0)\nos.setsid()\nos.fork() and os._exit(0)\ntime.sleep(1e6)",
        "os.fork() and os._exit(0)\nos.setsid()\n[os.close(fd) for fd in (0, 1, 2)]\ntime.sleep(1e6)",
        "subprocess.Popen(['setsid', 'nohup', 'sleep', '1000000'])",
    ] {
        let source = format!("import os, subprocess, time\n{daemon}\n# {marker}");
        let output = run(&source, patient()).await;
        assert_eq!(output.ended, Ended::Exited(0), "{}", text(&output.stderr));
        assert!(output.wall < PATIENCE / 2);
        none_left(&marker).await;
    }
}

#[tokio::test]
async fn a_run_that_nobody_waits_for_any_more_ends() {
    let marker = format!("marker-{}-dropped", std::process::id());
    let source = format!("import time; time.sleep(1e6) # {marker}");
    let start = Instant::now();
    let running_there = async {
        while running(&marker).is_none() {
            assert!(start.elapsed() < PATIENCE);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        output = run(&source, patient()) => panic!("{output:?}"),
        () = running_there => {}
    }
    none_left(&marker).await;
}

/// bwrap starts several processes one after the other, and each moment of that may be the last.
#[tokio::test]
async fn runs_that_are_dropped_at_any_moment_end() {
    let marker = format!("marker-{}-any-moment", std::process::id());
    let source = format!("import time; time.sleep(1e6) # {marker}");
    for moment in 0..100 {
        let run = run(&source, patient());
        let dropped = tokio::time::timeout(Duration::from_micros(300 * moment), run).await;
        assert!(dropped.is_err(), "{dropped:?}");
    }
    none_left(&marker).await;
}
