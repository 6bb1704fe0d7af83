//! Answers that go on while their engine changes its version.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_may_cross_versions_by_setting_if_all_are_known() {
    let mut stand = Stand::with(1, |fakes| Options {
        vllm: fakes.iter().map(vllm).collect(),
        in_flight: InFlight::Cross,
        ..Options::default()
    })
    .await;
    let first = stand.place(1, &[]).await;
    stand.fakes[0].set(Faults {
        crosses_at: Some(3),
        ..Faults::default()
    });
    let other = version(9).0;
    stand.pool.know("springtide-9-other".into(), &other);
    let events = stand.ask(&first, 5).await;
    let of = |version: &LoadedVersion, tokens| TokensOfVersion {
        serial: version.serial,
        root: version.root,
        tokens,
    };
    let expected = SampleEvent::Versions(vec![of(&first, 3), of(&other, 2)]);
    assert!(events.contains(&expected) && finished(&events), "{events:?}");
    assert!(stand.updater.serves(1));
}

/// An engine whose four answers wait after two tokens, which have arrived. What the first one began
/// with.
async fn busy_while_crossing() -> (Stand, Arc<LoadedVersion>, Vec<mpsc::Receiver<SampleEvent>>, Started) {
    let mut stand = Stand::with(1, |fakes| Options {
        vllm: fakes.iter().map(vllm).collect(),
        in_flight: InFlight::Cross,
        ..Options::default()
    })
    .await;
    let first = stand.place(1, &[]).await;
    stand.updater.in_force(&BTreeMap::new(), [1].into());
    stand.fakes[0].set(Faults {
        waits_after: Some(2),
        ..Faults::default()
    });
    let mut answers: Vec<_> = (0..4).map(|_| stand.submit(&first, 5)).collect();
    let Some(SampleEvent::Started(started)) = answers[0].recv().await else {
        panic!("the first event says who samples");
    };
    for events in &mut answers {
        for _ in 0..2 {
            assert!(matches!(next(events).await, Some(SampleEvent::Token(_))));
        }
    }
    (stand, first, answers, started)
}

#[tokio::test(flavor = "multi_thread")]
async fn during_a_crossing_update_answers_go_on_and_what_waits_is_routed_again() {
    let (mut stand, first, answers, started) = busy_while_crossing().await;
    let mut waiting = stand.submit(&first, 5);
    assert_eq!(&*started.engine, "vllm");
    assert!((started.holds)().await);
    let (second, checkpoint) = version(2);
    let name = stand.fakes[0].held().name.clone();
    let resume = async {
        while stand.fakes[0].held().name == name {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        stand.fakes[0].set(Faults::default());
    };
    let (changed, ()) = tokio::join!(stand.updater.change(0, &second, &checkpoint), resume);
    changed.unwrap();
    // an answer that ends here does not say which version sampled it
    assert!(!(started.holds)().await);
    stand.updater.in_force(&BTreeMap::new(), [2].into());
    assert_eq!(waiting.recv().await, Some(SampleEvent::VersionGone));
    let of = |version: &LoadedVersion, tokens| TokensOfVersion {
        serial: version.serial,
        root: version.root,
        tokens,
    };
    let expected = SampleEvent::Versions(vec![of(&first, 2), of(&second, 3)]);
    for mut events in answers {
        let mut all = Vec::new();
        while let Some(event) = events.recv().await {
            all.push(event);
        }
        assert!(finished(&all) && all.contains(&expected), "{all:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_passed_on_of_what_weights_sampled_that_failed_their_probe() {
    let (mut stand, _, answers, _) = busy_while_crossing().await;
    let (second, checkpoint) = version(2);
    let name = stand.fakes[0].held().name.clone();
    let resume = async {
        while stand.fakes[0].held().name == name {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let mut held = stand.fakes[0].held();
        held.faults = Faults {
            ignores_all: true,
            ..Faults::default()
        };
        // the patch went wrong
        held.model = Arc::new(ExactModel::from_checkpoint(&version(3).1).unwrap());
    };
    let (changed, ()) = tokio::join!(stand.updater.change(0, &second, &checkpoint), resume);
    let error = format!("{:#}", changed.unwrap_err());
    assert!(error.contains("probe_error_max"), "{error}");
    for mut events in answers {
        assert!(matches!(events.recv().await, Some(SampleEvent::Failed(_))));
        assert_eq!(events.recv().await, None);
    }
}
