//! A proxy between collector and upstream: its refusals are not final, and stop no other event.

use super::upstream::ProxyBody;
use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_proxys_refusal_is_not_final() {
    let dir = tempfile::tempdir().unwrap();
    let upstream = Upstream::default();
    let url = upstream.start().await;
    let event = feedback(Uuid::now_v7(), "good");
    fill(dir.path(), std::slice::from_ref(&event)).await;
    let bodies = [ProxyBody::Page, ProxyBody::Json, ProxyBody::Problem, ProxyBody::Untyped];
    let replies: Vec<Reply> = [400, 409, 413, 422]
        .into_iter()
        .zip(bodies)
        .map(|(status, body)| Reply::Proxy(status, body))
        .collect();
    upstream.answer_with(&replies);
    drain(dir.path(), &url, &options()).await;
    assert_eq!(upstream.ids(), BTreeSet::from([event.id]));
    assert!(!dir.path().join(REFUSED).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_a_proxy_always_refuses_stops_no_other_and_is_forwarded_once_it_may_pass() {
    let dir = tempfile::tempdir().unwrap();
    let postponed = dir.path().join("postponed");
    let upstream = Upstream::default();
    let url = upstream.start().await;
    *upstream.never.lock().unwrap() = Some("too long for the proxy");
    let options = Options {
        segment_bytes_max: 600,
        ..options()
    };
    let opened = open_at(dir.path(), &url, &options);
    let episode = Uuid::now_v7();
    let refused = [(); 2].map(|()| feedback(episode, "too long for the proxy"));
    for event in &refused {
        opened.spool.append(event).await.unwrap();
    }
    // Some of the same episode, in this segment and in later ones.
    let mut others = BTreeSet::new();
    for index in 0..12 {
        let event = feedback(if index % 3 == 0 { episode } else { Uuid::now_v7() }, "good");
        opened.spool.append(&event).await.unwrap();
        others.insert(event.id);
    }
    end(opened);
    let forward = async |until: &dyn Fn() -> bool| {
        let running = Running::start(open_at(dir.path(), &url, &options));
        let queue = &running.spool.queue;
        let started = Instant::now();
        while !until() || queue.first().is_some() {
            assert!(started.elapsed() < SOON, "not in time: {queue:?}, {:?}", upstream.ids());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let queue = queue.clone();
        running.stop().await;
        queue.level().bytes
    };
    let bytes = forward(&|| upstream.ids() == others).await;
    let files = segments(&postponed);
    let on_disk: u64 = files.iter().map(|file| file.metadata().unwrap().len()).sum();
    assert_eq!((files.len(), bytes), (2, on_disk));

    // They stay through a restart, and are tried again. A damaged one is saved.
    let mut damaged = std::fs::read(&files[0]).unwrap();
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    std::fs::write(&files[0], &damaged).unwrap();
    let tries = upstream.tries();
    forward(&|| segments(&postponed).len() == 1 && upstream.tries() > tries).await;
    let saved = postponed.join(format!("{:020}-0.damaged", 1));
    assert_eq!(std::fs::read(saved).unwrap(), damaged);

    *upstream.never.lock().unwrap() = None;
    forward(&|| segments(&postponed).is_empty()).await;
    others.insert(refused[1].id.clone());
    assert_eq!(upstream.ids(), others);
    assert!(!dir.path().join(REFUSED).exists());
}
