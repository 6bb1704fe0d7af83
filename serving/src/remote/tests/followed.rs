//! Engines whose weights a follower changes, or somebody else.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_changed_its_weights_by_itself_does_not_vouch_for_answers_that_end_early() {
    let mut follower = Stand::new(1).await;
    let mut gateway = Stand::behind(&follower).await;
    follower.place(1, &[]).await;
    let first = gateway.place(1, &[]).await;
    follower.fakes[0].set(Faults {
        waits_after: Some(1),
        ..Faults::default()
    });
    let mut events = gateway.submit(&first, 5);
    let Some(SampleEvent::Started(started)) = events.recv().await else {
        panic!("the first event says who samples");
    };
    assert!((started.holds)().await);
    follower.fakes[0].held().name = "springtide-2-other".into();
    assert!(!(started.holds)().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_a_follower_controls_serves_what_it_names_after_a_probe() {
    let mut follower = Stand::new(1).await;
    let mut gateway = Stand::behind(&follower).await;
    follower.place(1, &[]).await;
    let first = gateway.place(1, &[]).await;
    assert!(finished(&gateway.ask(&first, 4).await));
    // the name of another version is enough to know that it cannot be this one
    let (second, checkpoint) = version(2);
    assert!(
        gateway
            .updater
            .place(&second, &checkpoint, &BTreeSet::new())
            .await
            .is_err()
    );
    follower.place(2, &[]).await;
    while gateway.updater.serves(1) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let candidates = [1, 2].map(|serial| version(serial).0);
    while !gateway.updater.serves(2) {
        gateway.updater.recognize(&candidates).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(finished(&gateway.ask(&second, 4).await));
    // a name alone proves nothing
    follower.fakes[0].restart();
    let name = format!("springtide-1-{}", first.root.short());
    follower.fakes[0].held().name = name;
    while gateway.updater.serves(2) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    gateway.updater.recognize(&candidates).await;
    assert!(!gateway.updater.serves(1));
    // all updates were the follower's
    assert_eq!(follower.fakes[0].updates(), ["all", "patch"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_weights_that_an_engine_has_lost_goes_to_another_engine_and_nothing_fails() {
    let mut follower = Stand::new(2).await;
    for fake in &follower.fakes {
        fake.set(Faults {
            compares_weights: true,
            ..Faults::default()
        });
    }
    let servers = follower.fakes.iter().map(|fake| Server {
        control: false,
        ..vllm(fake)
    });
    let vllm = servers.collect();
    let mut gateway = Stand::with(0, |_| Options {
        vllm,
        ..Options::default()
    })
    .await;
    let first = follower.place(1, &[]).await;
    follower.mend(&[(1, 1.0)], 1, 2).await;
    let candidates = [1, 2].map(|serial| version(serial).0);
    while gateway.pool.placement(|engines| engines.servers(1)) < 2 {
        gateway.updater.recognize(&candidates).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // from here on, nobody but requests looks at the engines
    gateway.watch.take();
    let fakes = &follower.fakes;
    let conflicts = || fakes.iter().map(|fake| fake.held().conflicts).sum::<usize>();
    let (second, checkpoint) = version(2);
    follower.updater.change(0, &second, &checkpoint).await.unwrap();
    // without a look, the gateway believes that both hold version 1: one request is turned away
    let before = conflicts();
    for _ in 0..3 {
        assert!(finished(&gateway.ask(&first, 4).await));
    }
    assert_eq!(conflicts() - before, 1);
    assert_eq!(gateway.pool.state(0), State::Unproven);
    assert_eq!(gateway.pool.state(1), State::Serving(1));
    // it was not ejected as broken: a probe finds what it holds now
    assert!(
        gateway
            .updater
            .place(&second, &checkpoint, &BTreeSet::from([1]))
            .await
            .is_ok()
    );
    assert!(finished(&gateway.ask(&second, 4).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_weights_that_nobody_holds_any_more_waits_for_them() {
    let mut follower = Stand::new(1).await;
    follower.fakes[0].set(Faults {
        compares_weights: true,
        ..Faults::default()
    });
    let mut gateway = Stand::behind(&follower).await;
    let first = follower.place(1, &[]).await;
    gateway.place(1, &[]).await;
    gateway.watch.take();
    follower.place(2, &[]).await;
    let mut events = gateway.submit(&first, 4);
    while gateway.pool.state(0) != State::Unproven {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    while let Ok(event) = events.try_recv() {
        assert!(matches!(event, SampleEvent::Started(_)), "{event:?}");
    }
    // back again, as after a rollback
    follower.place(1, &[]).await;
    let (first, checkpoint) = version(1);
    gateway
        .updater
        .place(&first, &checkpoint, &BTreeSet::new())
        .await
        .unwrap();
    let mut all = Vec::new();
    while let Some(event) = events.recv().await {
        all.push(event);
    }
    assert!(finished(&all));
}
