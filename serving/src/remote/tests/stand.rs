//! A pool over fake engines, as `serve` and `follow` have one.

use super::*;

/// A gateway to an engine whose weights somebody else changes. It is watched until the guard is dropped.
pub(crate) fn gateway_to(engine: &Fake, unproved_error_max: Option<f32>) -> (tokio_util::sync::DropGuard, Updater) {
    let server = Server {
        control: false,
        ..vllm(engine)
    };
    let options = Options {
        vllm: vec![server],
        unproved_error_max,
        ..Options::default()
    };
    let pool = Pool::new(&options, 4, config(64)).unwrap();
    let stop = CancellationToken::new();
    tokio::spawn(pool.clone().watch(stop.clone()));
    let updater = Updater::new(pool, options).unwrap();
    (stop.drop_guard(), updater)
}

/// The pool and the updater of engines that take weights. They are watched until the guard is dropped.
pub(crate) fn updater_of(engines: &[Fake]) -> (tokio_util::sync::DropGuard, Pool, Updater) {
    let options = Options {
        vllm: engines.iter().map(vllm).collect(),
        ..Options::default()
    };
    let pool = Pool::new(&options, 4, config(64)).unwrap();
    let stop = CancellationToken::new();
    tokio::spawn(pool.clone().watch(stop.clone()));
    let updater = Updater::new(pool.clone(), options).unwrap();
    (stop.drop_guard(), pool, updater)
}

/// A pool over some engines, watched, and its updater.
pub(super) struct Stand {
    pub(super) fakes: Vec<Fake>,
    pub(super) pool: Pool,
    pub(super) updater: Updater,
    pub(super) watch: Option<tokio_util::sync::DropGuard>,
}

/// `queue_choices_max`: how many choices may wait. No timeout is short enough to matter.
pub(super) fn config(queue_choices_max: usize) -> Config {
    Config {
        queue_choices_max,
        queue_wait_max: Duration::from_secs(300),
        prompt_tokens_per_pass_max: 0,
        slots_reserved_for_production: 0,
        parked_max: Duration::from_secs(600),
    }
}

impl Stand {
    pub(super) async fn new(engines: usize) -> Stand {
        Stand::with(engines, |fakes| Options {
            vllm: fakes.iter().map(vllm).collect(),
            ..Options::default()
        })
        .await
    }

    pub(super) async fn with(engines: usize, options: impl FnOnce(&[Fake]) -> Options) -> Stand {
        let mut fakes = Vec::new();
        for _ in 0..engines {
            fakes.push(Fake::start().await);
        }
        let options = options(&fakes);
        let pool = Pool::new(&options, 4, config(64)).unwrap();
        let stop = CancellationToken::new();
        tokio::spawn(pool.clone().watch(stop.clone()));
        let updater = Updater::new(pool.clone(), options).unwrap();
        Stand {
            fakes,
            pool,
            updater,
            watch: Some(stop.drop_guard()),
        }
    }

    /// A gateway to the first engine of `follower`, which alone changes its weights.
    pub(super) async fn behind(follower: &Stand) -> Stand {
        let server = Server {
            control: false,
            ..vllm(&follower.fakes[0])
        };
        Stand::with(0, |_| Options {
            vllm: vec![server],
            ..Options::default()
        })
        .await
    }

    /// As the follower: tries until an engine serves the version.
    pub(super) async fn place(&mut self, serial: i64, kept: &[i64]) -> Arc<LoadedVersion> {
        let (version, checkpoint) = version(serial);
        let kept: BTreeSet<i64> = kept.iter().copied().collect();
        while self.updater.place(&version, &checkpoint, &kept).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        version
    }

    /// As the follower: gives engines the versions that they should hold, until `serial` has `engines`.
    pub(super) async fn mend(&mut self, shares: &[(i64, f64)], serial: i64, engines: usize) {
        while self.pool.placement(|placement| placement.servers(serial)) < engines {
            match self.updater.next_change(shares) {
                Some((engine, wanted)) => {
                    let (version, checkpoint) = version(wanted);
                    let _ = self.updater.change(engine, &version, &checkpoint).await;
                }
                None => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// All events of a request.
    pub(super) async fn ask(&self, version: &Arc<LoadedVersion>, max_tokens: usize) -> Vec<SampleEvent> {
        let mut events = self.submit(version, max_tokens);
        let mut all = Vec::new();
        while let Some(event) = events.recv().await {
            all.push(event);
        }
        all
    }

    pub(super) fn submit(&self, version: &Arc<LoadedVersion>, max_tokens: usize) -> mpsc::Receiver<SampleEvent> {
        self.submit_turn(version, max_tokens, None)
    }

    pub(super) fn submit_turn(
        &self,
        version: &Arc<LoadedVersion>,
        max_tokens: usize,
        session: Option<Uuid>,
    ) -> mpsc::Receiver<SampleEvent> {
        let (sender, events) = mpsc::channel(events_max(max_tokens));
        let request = self.request(version, max_tokens, session, sender);
        self.pool.submit(vec![request]).unwrap();
        events
    }

    pub(super) fn request(
        &self,
        version: &Arc<LoadedVersion>,
        max_tokens: usize,
        session: Option<Uuid>,
        events: mpsc::Sender<SampleEvent>,
    ) -> SampleRequest {
        request(version.clone(), max_tokens, session, events)
    }
}

pub(super) fn vllm(fake: &Fake) -> Server {
    Server {
        url: fake.url.clone(),
        ..Server::default()
    }
}

pub(super) fn openai(fake: &Fake, alias: Option<&str>) -> OpenAiServer {
    OpenAiServer {
        url: fake.url.clone(),
        alias: alias.map(str::to_owned),
        ..OpenAiServer::default()
    }
}

/// The last event of a request for a few tokens.
pub(crate) async fn last(pool: &Pool, version: Arc<LoadedVersion>) -> Option<SampleEvent> {
    let (sender, mut events) = mpsc::channel(events_max(4));
    pool.submit(vec![request(version, 4, None, sender)]).unwrap();
    let mut last = None;
    while let Some(event) = events.recv().await {
        last = Some(event);
    }
    last
}

fn request(
    version: Arc<LoadedVersion>,
    max_tokens: usize,
    session: Option<Uuid>,
    events: mpsc::Sender<SampleEvent>,
) -> SampleRequest {
    SampleRequest {
        version,
        prompt: Arc::new([1, 2, 3]),
        max_tokens,
        params: Params::default(),
        seed: 0,
        suppressed: None,
        constraint: None,
        ends: Default::default(),
        score_prompt: None,
        top_logprobs: 0,
        caller: Caller::new("default", None),
        class: TrafficClass::Production,
        priority: 0,
        session,
        events,
        submitted: Instant::now(),
    }
}

/// The next event after those that a sequence begins with.
pub(super) async fn next(events: &mut mpsc::Receiver<SampleEvent>) -> Option<SampleEvent> {
    loop {
        let event = events.recv().await;
        if !matches!(event, Some(SampleEvent::Started(_))) {
            return event;
        }
    }
}

pub(super) fn finished(events: &[SampleEvent]) -> bool {
    matches!(events.last(), Some(SampleEvent::Finished(_)))
}
