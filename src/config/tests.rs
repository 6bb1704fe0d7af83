use std::collections::BTreeSet;

use super::*;
use edge::options::Key;

fn parse(toml: &str) -> anyhow::Result<Config> {
    Ok(Figment::new().merge(Toml::string(toml)).extract()?)
}

const DOCUMENTED: &str = include_str!("../../springtide.toml");

#[test]
fn springtide_toml_has_the_defaults() {
    assert_eq!(parse(DOCUMENTED).unwrap(), Config::default());
}

/// The sections whose keys and comments are made from the types. The others are lists and what has a
/// form of its own.
const SECTIONS: &[(&str, &[Key])] = &[
    ("policy", Policy::KEYS),
    ("listen", Listen::KEYS),
    ("listen.connections_max", ConnectionsMax::KEYS),
    ("client", Client::KEYS),
    ("auth", edge::auth::AuthOptions::KEYS),
    ("auth.limits", edge::auth::LimitOptions::KEYS),
    ("tls", Tls::KEYS),
    ("telemetry", Telemetry::KEYS),
    ("postgres", Postgres::KEYS),
    ("postgres.urls", PostgresUrls::KEYS),
    ("kafka", Kafka::KEYS),
    ("stack", Stack::KEYS),
    ("stack.vllm", vllm::Options::KEYS),
    ("serve", serving::ServeOptions::KEYS),
    ("serve.tide", serving::tide::Options::KEYS),
    ("serve.remote", serving::remote::Options::KEYS),
    ("release", release::Options::KEYS),
    ("ingest", ingest::Options::KEYS),
    ("spool", ingest::spool::Options::KEYS),
    ("relay", serving::relay::Options::KEYS),
    ("world", world::service::Options::KEYS),
    ("world.machine", world::vm::Options::KEYS),
    ("follow", serving::follow::Options::KEYS),
    ("trainer", runs::Options::KEYS),
    ("trainer.realtime", runs::options::Realtime::KEYS),
    ("trainer.realtime.step", runs::settings::StepSettings::KEYS),
    (
        "trainer.realtime.step.optimiser",
        runs::settings::OptimizerSettings::KEYS,
    ),
    ("trainer.realtime.guards", runs::settings::Limits::KEYS),
    ("trainer.realtime.caps", runs::select::caps::Caps::KEYS),
    ("trainer.realtime.alarms", runs::options::Alarms::KEYS),
    ("trainer.offline", runs::options::Offline::KEYS),
    ("trainer.offline.sandbox", runs::grader::SandboxOptions::KEYS),
    ("trainer.offline.guards", runs::settings::Limits::KEYS),
];

/// `SPRINGTIDE_WRITE=1 cargo test --locked -p springtide springtide_toml` writes it.
#[test]
fn springtide_toml_is_made_from_the_types() {
    let made = made_from_types();
    if std::env::var_os("SPRINGTIDE_WRITE").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/springtide.toml"), &made).unwrap();
        return;
    }
    assert!(
        made == DOCUMENTED,
        "run it with SPRINGTIDE_WRITE=1, which writes springtide.toml"
    );
}

/// The file, with the keys and comments of [`SECTIONS`]. A section ends at an empty line. What a key is
/// set to, or an example behind `#`, stays as the file has it.
fn made_from_types() -> String {
    let defaults = toml::Value::try_from(Config::default()).unwrap();
    let mut made = String::new();
    let mut lines = DOCUMENTED.lines();
    while let Some(line) = lines.next() {
        made += &format!("{line}\n");
        let name = line.strip_prefix('[').and_then(|rest| rest.split(']').next());
        let Some((name, keys)) = SECTIONS.iter().find(|(section, _)| Some(*section) == name) else {
            continue;
        };
        let old: Vec<&str> = lines.by_ref().take_while(|line| !line.is_empty()).collect();
        let section = name.split('.').try_fold(&defaults, |table, part| table.get(part));
        for key in *keys {
            made += &written(name, key, &old, section);
        }
        made.push('\n');
    }
    made.truncate(made.trim_end().len());
    made + "\n"
}

/// A key with its comment, beside it or above; nothing where it has a section of its own.
fn written(section: &str, key: &Key, old: &[&str], defaults: Option<&toml::Value>) -> String {
    let name = match key.serde.split_once("rename = \"") {
        Some((_, name)) => name.trim_end_matches('"'),
        None => key.name,
    };
    let has_section = ["[", "[["].map(|open| format!("{open}{section}.{name}]"));
    if key.serde == "skip" || has_section.iter().any(|header| DOCUMENTED.contains(header)) {
        return String::new();
    }
    let is_key = |line: &&&str| line.trim_start_matches("# ").starts_with(&format!("{name} = "));
    let default = || match defaults.and_then(|defaults| defaults.get(name)) {
        Some(value) => format!("{name} = {value}"),
        None => format!("# {name} = \"…\""),
    };
    let kept = old.iter().find(is_key).map(|line| match line[2..].find(" # ") {
        Some(comment) => line[..2 + comment].trim_end().to_owned(),
        None => (*line).to_owned(),
    });
    let key_line = kept.unwrap_or_else(default);
    let about = key.about.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
    let beside = format!("{key_line:<33} # {about}");
    match (about.is_empty(), beside.chars().count() <= 100) {
        (true, _) => format!("{key_line}\n"),
        (false, true) => format!("{beside}\n"),
        (false, false) => format!("{}{key_line}\n", above(&about)),
    }
}

/// Comment lines of at most 100 characters.
fn above(text: &str) -> String {
    let mut lines = vec![String::from("#")];
    for word in text.split(' ') {
        if lines
            .last()
            .is_some_and(|line| line.chars().count() + 1 + word.chars().count() > 100)
        {
            lines.push(String::from("#"));
        }
        let line = lines.last_mut().unwrap();
        *line += " ";
        *line += word;
    }
    lines.join("\n") + "\n"
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
fn the_copy_that_the_fleet_serves_is_named_by_manifests_and_given_to_engines() {
    let mut config = parse("[policy]\nserves = \"int4-sym-g32.1\"").unwrap();
    config.resolve(Path::new("/srv"));
    let spec = Some(artifact::quant::Spec::Int4);
    assert_eq!(
        (config.policy.quantized.first().copied(), config.policy.quantized.len()),
        (spec, 1)
    );
    assert_eq!((config.serve.remote.quantized, config.follow.quantized), (spec, spec));
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
                [auth.oidc]\nclient_secret = 'secret-15'\n\
                [kafka.librdkafka]\n'sasl.password' = 'secret-5'";
    let shown = toml::to_string(&parse(text).unwrap()).unwrap();
    assert!(!shown.contains("secret"), "{shown}");
}
