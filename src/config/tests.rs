use std::collections::BTreeSet;

use super::*;

fn parse(toml: &str) -> anyhow::Result<Config> {
    Ok(Figment::new().merge(Toml::string(toml)).extract()?)
}

const DOCUMENTED: &str = include_str!("../../springtide.toml");

#[test]
fn springtide_toml_has_the_defaults() {
    assert_eq!(parse(DOCUMENTED).unwrap(), Config::default());
}

#[test]
fn springtide_toml_mentions_every_key() {
    let documented = documented_keys();
    let (mut keys, mut missing) = (0, Vec::new());
    for header in documented
        .iter()
        .filter_map(|(header, key)| key.is_none().then_some(header))
    {
        if header == "[kafka.librdkafka]" {
            continue; // takes any key
        }
        // An unknown key makes serde name the keys that a section has.
        let unknown = Toml::string(&format!("{header}\nno_such_key = 1"));
        let error = Figment::new().merge(unknown).extract::<Config>().unwrap_err();
        let figment::error::Kind::UnknownField(_, fields) = error.kind else {
            panic!("{header}: {error}");
        };
        for field in fields {
            let section = header.trim_matches(['[', ']']);
            let path = if section.is_empty() {
                (*field).to_owned()
            } else {
                format!("{section}.{field}")
            };
            let is_mentioned = documented.iter().any(|(other, key)| {
                let other_section = other.trim_matches(['[', ']']);
                (other == header && key.as_deref() == Some(*field))
                    || other_section == path
                    || other_section.starts_with(&format!("{path}."))
            });
            keys += 1;
            if !is_mentioned {
                missing.push(path);
            }
        }
    }
    assert!(missing.is_empty(), "springtide.toml does not mention {missing:?}");
    assert!(keys > 100, "only {keys} keys were found");
}

/// Every section header, with each of its keys and without a key; commented ones included.
fn documented_keys() -> BTreeSet<(String, Option<String>)> {
    let mut header = String::new();
    let mut keys = BTreeSet::from([(header.clone(), None)]);
    for line in DOCUMENTED.lines() {
        let line = line.trim_start_matches(['#', ' ']);
        if line.starts_with('[') {
            header = line.split_whitespace().next().unwrap_or_default().to_owned();
            keys.insert((header.clone(), None));
        } else if let Some((key, _)) = line.split_once('=') {
            keys.insert((header.clone(), Some(key.trim().to_owned())));
        }
    }
    keys
}

#[test]
fn an_unknown_field_is_refused_by_name() {
    let error = parse("[listen]\nserv = \"127.0.0.1:1\"").unwrap_err();
    assert!(error.to_string().contains("serv"), "{error}");
}

#[test]
fn default_paths_are_in_the_state_folder() {
    let mut config = parse("state_dir = \"elsewhere\"").unwrap();
    config.resolve(Path::new("/srv"));
    assert_eq!(config.store_url(), "file:///srv/elsewhere/store");
    assert_eq!(config.keys_dir(), Path::new("/srv/elsewhere/keys"));
    assert_eq!(
        config.ingest.payload_store.as_deref(),
        Some("file:///srv/elsewhere/payloads")
    );
    assert_eq!(config.serve.state_dir, Path::new("/srv/elsewhere/serve"));
}

#[test]
fn the_alias_to_learn_from_follows_from_the_arms_unless_it_is_named() {
    let no_learner =
        "[[release.arm]]\nalias = 'champion'\nweight = 0.7\n[[release.arm]]\nalias = 'base'\nweight = 0.3\n";
    let by_champion = "[trainer.realtime]\nalias = 'champion'\n";
    let completed = |text: &str| {
        let config = Config::complete(&Figment::new().merge(Toml::string(text))).unwrap();
        config.check().unwrap();
        let arms = config.release.arms.iter().map(|arm| (arm.alias.clone(), arm.weight));
        (config.learning().alias.name().to_owned(), arms.collect::<Vec<_>>())
    };
    let arms = |arms: &[(&str, f64)]| {
        arms.iter()
            .map(|(alias, weight)| ((*alias).to_owned(), *weight))
            .collect::<Vec<_>>()
    };
    let two = arms(&[("champion", 0.7), ("base", 0.3)]);
    assert_eq!(completed(no_learner), ("champion".to_owned(), two.clone()));
    assert_eq!(
        completed(&format!("{no_learner}{by_champion}")),
        ("champion".to_owned(), two)
    );
    let before = arms(&[("champion", 0.6), ("base", 0.4)]);
    assert_eq!(completed(by_champion), ("champion".to_owned(), before));
    let three = arms(&[("learner", 0.3), ("champion", 0.5), ("base", 0.2)]);
    assert_eq!(completed(""), ("learner".to_owned(), three));
}

#[test]
fn a_role_on_every_interface_is_reached_over_loopback() {
    let config = parse("[listen]\ncontrol = \"0.0.0.0:9002\"").unwrap();
    assert_eq!(config.control_url(), "http://127.0.0.1:9002");
    let config = parse("[client]\ncontrol = \"https://control.example/\"").unwrap();
    assert_eq!(config.control_url(), "https://control.example");
    let config = parse("[client.clusters]\neu = \"https://serve.eu.example/\"").unwrap();
    assert_eq!(config.harness_urls().clusters["eu"], "https://serve.eu.example");
    let error = parse("[client.clusters]\neu = \"serve.eu.example\"").unwrap().check();
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("client.clusters.eu is not a base URL")
    );
    let config = parse("[tls]\ntrain = { cert = \"t.pem\", key = \"t.key\" }").unwrap();
    assert_eq!(config.local_url(Part::Train), "https://127.0.0.1:8003");
    assert_eq!(config.serve_url(), "http://127.0.0.1:8000");
}

#[test]
fn secrets_are_not_printed() {
    let text = "[postgres]\nurl = 'postgres://u:secret-1@h/d'\n[client]\napi_key = 'secret-2'\n\
                [serve]\napi_key = 'secret-3'\n[trainer]\napi_key = 'secret-4'\n\
                [spool]\napi_key = 'secret-6'\ncaller_key = 'secret-7'\n\
                [relay]\napi_key = 'secret-8'\ncaller_key = 'secret-9'\n[policy]\nstore_api_key = 'secret-10'\n\
                [follow]\ncaller_key = 'secret-11'\nengine_api_key = 'secret-12'\napi_key = 'secret-13'\n[world]\ncaller_key = 'secret-14'\n\
                [kafka.librdkafka]\n'sasl.password' = 'secret-5'";
    let shown = toml::to_string(&parse(text).unwrap()).unwrap();
    assert!(!shown.contains("secret"), "{shown}");
}
