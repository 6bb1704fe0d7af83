//! Checks of the whole configuration. Messages name the fields as the file spells them, and say
//! what to do.

use std::collections::BTreeMap;

use anyhow::{Context, bail, ensure};
use event_log::judge::Endpoint;

use super::{Config, Part};

impl Config {
    /// Refuses values that are out of range or cannot work together.
    pub fn check(&self) -> anyhow::Result<()> {
        self.ingest.check()?;
        self.spool.check()?;
        self.relay.check()?;
        self.follow.check()?;
        self.world.check()?;
        self.auth.limits.check()?;
        self.serve.check()?;
        self.stack.vllm.check()?;
        let lora = &self.trainer.realtime.lora;
        ensure!(
            !self.stack.vllm.adapters || lora.is_some() || !self.trainer.realtime.enabled,
            "stack.vllm.adapters is true, and the realtime run trains all weights: set trainer.realtime.lora"
        );
        ensure!(
            self.policy.serves.is_none() || lora.is_none(),
            "policy.serves names a quantized copy, and the realtime run trains an adapter, which has none: remove \
             trainer.realtime.lora or policy.serves"
        );
        self.release.check()?;
        self.trainer.check()?;
        self.check_ports()?;
        self.check_store()?;
        self.check_learning()?;
        self.policy.check_ranges("policy")?;
        self.listen.check_ranges("listen")?;
        self.listen.connections_max.check_ranges("listen.connections_max")?;
        self.postgres.check_ranges("postgres")?;
        self.check_clusters()?;
        self.tls.check()?;
        self.check_remote_servers()?;
        store::check_policy(&self.policy.name).context("policy.name")?;
        self.check_tenant()?;
        let quantized = &self.policy.quantized;
        if let Some(twice) = (1..quantized.len()).find(|&i| quantized[..i].contains(&quantized[i])) {
            bail!("policy.quantised names {} twice: name it once", quantized[twice]);
        }
        Ok(())
    }

    fn check_tenant(&self) -> anyhow::Result<()> {
        let tenant = &self.policy.tenant;
        ensure!(
            !tenant.is_empty(),
            "policy.tenant is empty: give the tenant that the policy belongs to"
        );
        ensure!(
            self.auth.required || tenant == edge::auth::OPEN_TENANT,
            "policy.tenant is {tenant:?}, but without auth.required every caller belongs to the tenant {:?}, so there \
             would be nothing to learn from: set auth.required",
            edge::auth::OPEN_TENANT
        );
        Ok(())
    }

    fn check_ports(&self) -> anyhow::Result<()> {
        let mut fields_by_port: BTreeMap<u16, &str> = BTreeMap::new();
        for (field, address) in self.listen_addresses() {
            let port = address.port();
            ensure!(
                port != 0,
                "{field} has port 0, which other roles could not find: give a fixed port"
            );
            if let Some(other) = fields_by_port.insert(port, field) {
                bail!("{other} and {field} both have port {port}: change one of them");
            }
        }
        Ok(())
    }

    /// Checks the API keys that `callers` need, the roles of this process that call others.
    pub fn check_auth(&self, callers: &[Part]) -> anyhow::Result<()> {
        let listen = &self.listen;
        for address in [listen.serve, listen.ingest, listen.control, listen.train] {
            edge::bind::check(address, self.auth.required)?;
        }
        if let Some(oidc) = &self.auth.oidc {
            oidc.check().map_err(anyhow::Error::msg)?;
            ensure!(
                self.auth.required,
                "auth.oidc is set, but without auth.required everybody is let in: set auth.required"
            );
        }
        if self.auth.required {
            let replica = format!("replica --replica {}", self.serve.replica);
            // The least that each needs: serve reports to control, the trainer requests rollouts.
            for (caller, field, key, scope) in [
                (Part::Serve, "serve.api_key", &self.serve.api_key, replica.as_str()),
                (Part::Train, "trainer.api_key", &self.trainer.api_key, "completions"),
            ] {
                ensure!(
                    key.is_some() || !callers.contains(&caller),
                    "auth.required is true but {field} is not set, so that role could not call the others: \
                     make a key with `springtide key create --scope {scope}` while Postgres runs, and set it"
                );
            }
        }
        Ok(())
    }

    fn check_store(&self) -> anyhow::Result<()> {
        if let Some(store) = &self.policy.store {
            ensure!(
                ["file:///", "s3://", "http://", "https://"]
                    .iter()
                    .any(|scheme| store.starts_with(scheme)),
                "policy.store is {store:?}: give file:///an/absolute/folder, s3://bucket/prefix or http://a-relay:8004"
            );
        }
        Ok(())
    }

    fn check_clusters(&self) -> anyhow::Result<()> {
        for (cluster, url) in &self.client.clusters {
            // not printed: it may hold a password
            ensure!(
                Endpoint::is_base_url(url),
                "client.clusters.{cluster} is not a base URL; give that of serve in this cluster, such as \
                 https://serve.eu.example"
            );
        }
        Ok(())
    }

    fn check_learning(&self) -> anyhow::Result<()> {
        use release::LearningAlias;
        let realtime = &self.trainer.realtime;
        if let Some(alias) = &realtime.alias {
            ensure!(
                LearningAlias::of(alias).is_some(),
                "trainer.realtime.alias is {alias:?}: give \"learner\" or \"champion\""
            );
        }
        let learning = self.learning();
        let alias = learning.alias.name();
        let served = self.release.arms.iter().any(|arm| arm.alias == alias);
        ensure!(
            served || !learning.enabled,
            "trainer.realtime.alias is {alias:?}, but no release.arm serves it, so there would be nothing to learn from: \
             add an arm for it or set trainer.realtime.enabled = false"
        );
        ensure!(
            learning.alias == LearningAlias::Learner || self.release.champion_every == 1,
            "release.champion_every is {}, but the realtime run learns from champion, which therefore follows every \
             version: remove it, or add a release.arm for learner and set trainer.realtime.alias to that",
            self.release.champion_every
        );
        ensure!(
            learning.alias == LearningAlias::Learner
                || LearningAlias::by_arms(&self.release.arms) == LearningAlias::Champion,
            "a release.arm is for learner, but the realtime run learns from champion, so learner never has a version: \
             remove the arm or set trainer.realtime.alias to \"learner\""
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut Config)) -> String {
        let mut config = Config::default();
        change(&mut config);
        config
            .check()
            .and_then(|()| config.check_auth(&[Part::Serve, Part::Train]))
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn the_defaults_are_accepted() {
        Config::default().check().unwrap();
        Config::default().check_auth(&[Part::Serve, Part::Train]).unwrap();
        let mut open = Config::default();
        open.auth.required = true;
        open.check_auth(&[]).unwrap(); // a role that calls no other needs no key
    }

    #[test]
    fn a_port_used_twice_is_refused_with_both_names() {
        let why = refusal(|config| config.kafka.port = config.listen.train.port());
        assert!(why.contains("listen.train") && why.contains("kafka.port"), "{why}");
    }

    #[test]
    fn private_ports_are_not_checked_where_external_servers_are_used() {
        let mut config = Config::default();
        config.kafka.port = config.listen.train.port();
        config.kafka.brokers = Some("localhost:9092".to_owned());
        config.check().unwrap();
    }

    #[test]
    fn listening_beyond_loopback_needs_keys() {
        let why = refusal(|config| config.listen.serve = "0.0.0.0:8000".parse().unwrap());
        assert!(why.contains("auth.required"), "{why}");
    }

    #[test]
    fn an_identity_provider_needs_groups_and_that_keys_are_required() {
        let oidc = |groups: &str| {
            let oidc = format!(r#"{{"issuer": "https://id.example", "groups": {groups}}}"#);
            let oidc = serde_json::from_str(&oidc).unwrap();
            refusal(|config| config.auth.oidc = Some(oidc))
        };
        let why = oidc("[]");
        assert!(why.contains("auth.oidc.groups"), "{why}");
        let why = oidc(r#"[{"name": "sre", "role": "release"}]"#);
        assert!(why.contains("set auth.required"), "{why}");
    }

    #[test]
    fn a_missing_key_is_asked_for_with_the_least_scope() {
        let why = refusal(|config| config.auth.required = true);
        assert!(
            why.contains("serve.api_key") && why.contains("--scope replica --replica"),
            "{why}"
        );
        assert!(!why.contains("admin"), "{why}");
        let why = refusal(|config| {
            config.auth.required = true;
            config.serve.api_key = Some("spring_1".to_owned());
        });
        assert!(
            why.contains("trainer.api_key") && why.contains("--scope completions"),
            "{why}"
        );
        assert!(!why.contains("admin"), "{why}");
    }

    #[test]
    fn a_tenant_that_no_caller_can_belong_to_is_refused() {
        let why = refusal(|config| config.policy.tenant = "acme".to_owned());
        assert!(why.contains("policy.tenant") && why.contains("auth.required"), "{why}");
        let why = refusal(|config| config.policy.tenant.clear());
        assert!(why.contains("policy.tenant is empty"), "{why}");
    }

    #[test]
    fn a_policys_name_that_the_store_would_refuse_is_refused_at_load() {
        for name in ["", "Qwen2.5-0.5B-Instruct", "my model"] {
            let mut config = Config::default();
            config.policy.name = name.to_owned();
            let why = format!("{:#}", config.check().unwrap_err());
            assert!(
                why.contains("policy.name") && why.contains("is not a policy's name"),
                "{why}"
            );
        }
    }

    #[test]
    fn a_listener_without_connections_is_refused() {
        let why = refusal(|config| config.listen.connections_max.relay = 0);
        assert!(why.contains("listen.connections_max.relay"), "{why}");
    }

    #[test]
    fn a_fleet_that_serves_a_copy_trains_no_adapter_and_needs_vllm() {
        let why = refusal(|config| {
            config.policy.serves = Some(artifact::quant::Spec::Int4);
            config.trainer.realtime.lora = Some(Default::default());
        });
        assert!(why.contains("policy.serves") && why.contains("lora"), "{why}");
        let why = refusal(|config| {
            config.serve.remote.quantized = Some(artifact::quant::Spec::Int4);
            config.serve.remote.sglang = vec![serving::remote::Server {
                url: "http://a:1".into(),
                ..Default::default()
            }];
        });
        assert!(why.contains("SGLang"), "{why}");
    }

    #[test]
    fn an_alias_to_learn_from_needs_an_arm() {
        let without = |config: &mut Config, alias: &str| {
            config.release.arms.retain(|arm| arm.alias != alias);
            config.release.arms[0].weight += 1.0 - config.release.arms.iter().map(|arm| arm.weight).sum::<f64>();
        };
        let why = refusal(|config| {
            without(config, "learner");
            without(config, "champion");
        });
        assert!(why.contains("\"champion\", but no release.arm serves it"), "{why}");
        let why = refusal(|config| {
            without(config, "learner");
            config.trainer.realtime.alias = Some("learner".to_owned());
        });
        assert!(why.contains("\"learner\", but no release.arm serves it"), "{why}");
        let mut config = Config::default();
        without(&mut config, "champion");
        config.check().unwrap();
    }

    #[test]
    fn the_release_loop_follows_two_aliases() {
        let why = refusal(|config| config.trainer.realtime.alias = Some("champion2".to_owned()));
        assert!(why.contains("trainer.realtime.alias"), "{why}");
    }

    #[test]
    fn a_champion_that_is_learned_from_follows_every_version() {
        let why = refusal(|config| {
            config.trainer.realtime.alias = Some("champion".to_owned());
            config.release.champion_every = 2;
        });
        assert!(why.contains("release.champion_every is 2"), "{why}");
        let why = refusal(|config| config.trainer.realtime.alias = Some("champion".to_owned()));
        assert!(why.contains("a release.arm is for learner"), "{why}");
    }

    #[test]
    fn streams_and_threads_are_checked_for_the_default_store_too() {
        let why = refusal(|config| config.policy.cache_streams = 0);
        assert!(why.contains("policy.cache_streams"), "{why}");
        let why = refusal(|config| config.policy.sync_threads = 257);
        assert!(why.contains("policy.sync_threads"), "{why}");
    }

    #[test]
    fn a_store_that_is_not_a_url_is_refused() {
        let why = refusal(|config| config.policy.store = Some("weights".to_owned()));
        assert!(why.contains("file:///"), "{why}");
    }
}
