//! `springtide control`: the control API and the release loop. Any number may run; one of them
//! leads.

use std::sync::Arc;

use anyhow::Context;
use control::api::dead_letters::DeadLetters;
use control::api::erasures::Erasures;
use control::api::texts::Texts;
use control::page::Site;
use control::{Evaluations, Parts};
use event_log::Producer;
use release::{self, ReleaseService};

use super::App;
use crate::config::Part;
use crate::role::{self, Role};
use crate::{policy_store, signing_keys};

#[derive(Debug, Clone, clap::Args)]
pub struct Args {}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let role = Role::start(app, Part::Control).await?;
        let config = &app.config;
        role.own_policy(config).await?;
        signing_keys::prepare(config, &role.pool, "control", "release").await?;
        let listener = role.listen(config, Part::Control).await?;
        let store = policy_store::open(config)?;
        let kafka = config.kafka_client()?;
        let producer = Producer::new(&kafka).context("connect to the log")?;
        let releases = ReleaseService::new(
            config.release.clone(),
            config.learning(),
            config.policy.name.clone(),
            role.pool.clone(),
            store.clone(),
            &config.keys_dir(),
            Some(producer.clone()),
        )?;
        releases.evaluate_with(Arc::new(Evaluations {
            pool: role.pool.clone(),
            policy: config.policy.name.clone(),
        }));
        // Of the store of payloads, this role reads the folder of exports alone.
        let exports = role::payloads(app)
            .map(|payloads| payloads.exports())
            .inspect_err(|error| {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "exports of datasets cannot be downloaded from here"
                );
            });
        let report = config.state_dir.join("report.html");
        let policy = &config.policy.name;
        // people who look at the pages keep their key in a cookie
        let auth = role.auth.clone().with_cookies();
        let texts = Arc::new(Texts::new(role.pool.clone(), policy, store.clone(), config.keys_dir()));
        let dead_letters = Arc::new(DeadLetters::new(role.pool.clone(), kafka, producer));
        let site = Site::new(
            role.pool.clone(),
            policy,
            texts.clone(),
            dead_letters.clone(),
            role.shutdown.clone(),
        );
        let erasures = Erasures {
            pool: role.pool.clone(),
            store: store.clone(),
            releases: releases.clone(),
        };
        tokio::spawn(erasures.clone().run(role.shutdown.clone()));
        let parts = Parts {
            site,
            auth: auth.clone(),
            releases: releases.clone(),
            texts,
            dead_letters,
            erasures,
            exports: exports.ok(),
            store,
            report,
            harness_urls: config.harness_urls(),
        };
        let routes = control::routes(&role.pool, parts);
        let router = control::page::for_browsers(routes.protected_by(&auth, "Springtide control"))
            .merge(role.metrics(config, Part::Control));
        let server = edge::server::run(listener, router, role.shutdown.clone());
        tokio::try_join!(server, release::run(releases, role.shutdown)).map(drop)
    }
}
