//! Slots of engines elsewhere are lent to background sequences and taken back.

use super::*;
use crate::engine::load::Limit;

const TOKENS: usize = 12;

fn background(stand: &Stand, version: &Arc<LoadedVersion>, params: Params) -> mpsc::Receiver<SampleEvent> {
    let (sender, events) = mpsc::channel(events_max(TOKENS));
    let request = SampleRequest {
        class: TrafficClass::Background,
        caller: Caller::new("default", None).working_on(Work::Rollout(None)),
        params,
        ..stand.request(version, TOKENS, None, sender)
    };
    stand.pool.submit(vec![request]).unwrap();
    events
}

/// Answers wait after two tokens.
async fn waiting(count: usize, params: &Params) -> (Stand, Arc<LoadedVersion>, Vec<mpsc::Receiver<SampleEvent>>) {
    let mut stand = Stand::new(1).await;
    let version = stand.place(1, &[]).await;
    stand.fakes[0].set(Faults {
        waits_after: Some(2),
        ..Faults::default()
    });
    let mut rollouts: Vec<_> = (0..count)
        .map(|_| background(&stand, &version, params.clone()))
        .collect();
    for events in &mut rollouts {
        assert!(matches!(next(events).await, Some(SampleEvent::Token(_))));
    }
    (stand, version, rollouts)
}

async fn until(stand: &Stand, is_so: impl Fn(&Load) -> bool) {
    while !stand.pool.loads().iter().all(&is_so) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The tokens after the first, and the last event.
async fn rest(mut events: mpsc::Receiver<SampleEvent>) -> (usize, Option<SampleEvent>) {
    let (mut tokens, mut last) = (0, None);
    while let Some(event) = events.recv().await {
        match event {
            SampleEvent::Token(_) => tokens += 1,
            SampleEvent::Started(_) => {}
            other => last = Some(other),
        }
    }
    (tokens, last)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_takes_the_slot_of_a_rollout_which_continues_after_its_tokens() {
    let (stand, version, rollouts) = waiting(4, &Params::default()).await;
    let mut user = stand.submit(&version, TOKENS);
    assert!(matches!(next(&mut user).await, Some(SampleEvent::Token(_))));
    until(&stand, |load| (load.production, load.background) == (1, 3)).await;
    assert_eq!(stand.pool.loads()[0].background_waiting, 1);
    stand.fakes[0].set(Faults::default());
    for events in rollouts {
        let (tokens, last) = rest(events).await;
        assert_eq!(tokens, TOKENS - 1, "each token once");
        assert_eq!(last, Some(SampleEvent::Finished(Finish::Length)));
    }
    until(&stand, |load| load.background == 0).await;
    let totals = stand.pool.loads().remove(0).totals;
    let used = totals.work[&Work::Rollout(None)];
    assert_eq!((totals.taken_back, used.thrown_away), (1, 0));
    assert_eq!((used.sampled, used.read), (4 * TOKENS as u64, 4 * 3));
    assert!(used.read_again > 3, "the prompt and what was sampled: {used:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rollouts_leave_an_engine_that_lends_nothing_and_come_back() {
    let (stand, version, rollouts) = waiting(3, &Params::default()).await;
    let lend = |slots| {
        let whole = false;
        stand.pool.lend(&[Limit { slots, whole }]);
    };
    lend(1);
    until(&stand, |load| load.background == 1).await;
    lend(0);
    until(&stand, |load| (load.background, load.background_waiting) == (0, 3)).await;
    stand.fakes[0].set(Faults::default());
    assert!(finished(&stand.ask(&version, TOKENS).await));
    assert_eq!(stand.pool.loads()[0].background, 0);
    lend(usize::MAX);
    for events in rollouts {
        assert_eq!(
            rest(events).await,
            (TOKENS - 1, Some(SampleEvent::Finished(Finish::Length)))
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_that_nothing_else_can_continue_is_given_up_and_counted() {
    let penalty = Params {
        frequency_penalty: 0.5,
        ..Params::default()
    };
    let (stand, _, mut rollouts) = waiting(1, &penalty).await;
    let whole = false;
    assert!(matches!(next(&mut rollouts[0]).await, Some(SampleEvent::Token(_))));
    stand.pool.lend(&[Limit { slots: 0, whole }]);
    assert_eq!(rest(rollouts.remove(0)).await, (0, Some(SampleEvent::Displaced)));
    until(&stand, |load| load.background == 0).await;
    let used = stand.pool.loads()[0].totals.work[&Work::Rollout(None)];
    assert_eq!((used.sampled, used.thrown_away), (0, 2));
}
