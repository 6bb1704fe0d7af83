//! The contradictions between sections. Each message names the fields as the file spells them and says what to do.

use std::collections::BTreeMap;

use anyhow::{anyhow, ensure};

use super::Config;

impl Config {
    /// Refuses what cannot work together.
    pub fn check(&self) -> anyhow::Result<()> {
        self.ingest.check()?;
        self.spool.check()?;
        self.relay.check()?;
        self.serve.check().map_err(|why| anyhow!(why))?;
        self.release.check().map_err(|why| anyhow!(why))?;
        self.trainer.check().map_err(|why| anyhow!(why))?;
        self.check_ports()?;
        self.check_store()?;
        self.check_learning()?;
        ensure!(
            self.postgres.connections_max >= 4,
            "postgres.connections_max is {}; a role needs at least 4",
            self.postgres.connections_max
        );
        ensure!(
            !self.policy.name.is_empty(),
            "policy.name is empty; give the model a name"
        );
        let quantised = &self.policy.quantised;
        if let Some(twice) = (1..quantised.len()).find(|&i| quantised[..i].contains(&quantised[i])) {
            return Err(anyhow!(
                "policy.quantised names {} twice; name it once",
                quantised[twice]
            ));
        }
        Ok(())
    }

    fn check_ports(&self) -> anyhow::Result<()> {
        let mut taken: BTreeMap<u16, &str> = BTreeMap::new();
        let listen = &self.listen;
        let mut ports = vec![
            ("listen.serve", listen.serve.port()),
            ("listen.ingest", listen.ingest.port()),
            ("listen.control", listen.control.port()),
            ("listen.train", listen.train.port()),
        ];
        if self.postgres.url.is_none() {
            ports.push(("postgres.port", self.postgres.port));
        }
        if self.kafka.brokers.is_none() {
            ports.push(("kafka.port", self.kafka.port));
            ports.push(("kafka.controller_port", self.kafka.controller_port));
        }
        for (field, port) in ports {
            ensure!(
                port != 0,
                "{field} has port 0; the other roles could not find it: give a number"
            );
            if let Some(other) = taken.insert(port, field) {
                return Err(anyhow!(
                    "{other} and {field} both have port {port}; give one of them another"
                ));
            }
        }
        Ok(())
    }

    /// What only commands other than `key` and `migrate` must satisfy: whoever asks for keys needs them first.
    pub fn check_auth(&self) -> anyhow::Result<()> {
        let listen = &self.listen;
        for address in [listen.serve, listen.ingest, listen.control, listen.train] {
            edge::bind::check(address, self.auth.required)?;
        }
        if self.auth.required {
            for (field, key) in [
                ("serve.api_key", &self.serve.api_key),
                ("trainer.api_key", &self.trainer.api_key),
            ] {
                ensure!(
                    key.is_some(),
                    "auth.required is true and {field} is not set, so that role could not call the others: \
                     make one with `springtide key create --role admin`, with Postgres running, and set it"
                );
            }
        }
        Ok(())
    }

    fn check_store(&self) -> anyhow::Result<()> {
        let Some(store) = &self.policy.store else {
            return Ok(());
        };
        ensure!(
            ["file:///", "s3://", "http://", "https://"]
                .iter()
                .any(|scheme| store.starts_with(scheme)),
            "policy.store is {store:?}; give file:///an/absolute/folder, s3://bucket/prefix or http://a-relay:8004"
        );
        ensure!(
            (1..=256).contains(&self.policy.cache_streams),
            "policy.cache_streams is {}, and must be 1 to 256",
            self.policy.cache_streams
        );
        ensure!(
            (1..=256).contains(&self.policy.sync_threads),
            "policy.sync_threads is {}, and must be 1 to 256",
            self.policy.sync_threads
        );
        ensure!(
            cfg!(feature = "s3") || !store.starts_with("s3://"),
            "policy.store is {store:?}, and this program was built without it: build with --features s3"
        );
        Ok(())
    }

    fn check_learning(&self) -> anyhow::Result<()> {
        use serving::release::{CHAMPION, REALTIME};
        let realtime = &self.trainer.realtime;
        for (field, value, only) in [("line", &realtime.line, REALTIME), ("alias", &realtime.alias, CHAMPION)] {
            ensure!(
                value == only,
                "trainer.realtime.{field} is {value:?}; the release loop follows only {only:?}, so leave it at that"
            );
        }
        let alias = &self.trainer.realtime.alias;
        let served = self.release.arms.iter().any(|arm| arm.alias == *alias);
        ensure!(
            served || !self.trainer.realtime.enabled,
            "trainer.realtime.alias is {alias:?}, and no release.arm serves it, so nothing would ever be learnt: \
             name it in an arm or set trainer.realtime.enabled = false"
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
            .and_then(|()| config.check_auth())
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn the_defaults_contradict_nothing() {
        Config::default().check().unwrap();
        Config::default().check_auth().unwrap();
    }

    #[test]
    fn a_port_used_twice_is_refused_with_both_names() {
        let why = refusal(|config| config.kafka.port = config.listen.train.port());
        assert!(why.contains("listen.train") && why.contains("kafka.port"), "{why}");
    }

    #[test]
    fn a_private_servers_port_does_not_matter_where_an_external_one_is_used() {
        let mut config = Config::default();
        config.kafka.port = config.listen.train.port();
        config.kafka.brokers = Some("broker:9092".to_owned());
        config.check().unwrap();
    }

    #[test]
    fn other_machines_are_let_in_only_with_keys() {
        let why = refusal(|config| config.listen.serve = "0.0.0.0:8000".parse().unwrap());
        assert!(why.contains("auth.required"), "{why}");
        let why = refusal(|config| config.auth.required = true);
        assert!(why.contains("serve.api_key"), "{why}");
    }

    #[test]
    fn an_alias_to_learn_from_that_nobody_is_served_by_is_refused() {
        let why = refusal(|config| {
            config.release.arms.retain(|arm| arm.alias != "champion");
            config.release.arms[0].weight = 1.0;
        });
        assert!(why.contains("no release.arm serves it"), "{why}");
    }

    #[test]
    fn a_line_or_an_alias_that_the_release_loop_does_not_follow_is_refused() {
        let why = refusal(|config| config.trainer.realtime.alias = "champion2".to_owned());
        assert!(why.contains("trainer.realtime.alias"), "{why}");
        let why = refusal(|config| config.trainer.realtime.line = "other".to_owned());
        assert!(why.contains("trainer.realtime.line"), "{why}");
    }

    #[test]
    fn a_store_that_is_no_url_is_refused() {
        let why = refusal(|config| config.policy.store = Some("weights".to_owned()));
        assert!(why.contains("file:///"), "{why}");
    }
}
