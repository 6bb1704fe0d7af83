//! `springtide --help` and `--version`: commands in groups, and examples.

use std::fmt::Write;

use clap::Subcommand;
use clap::builder::styling::Style;

/// With the commit, where the build script knows it.
pub const VERSION: &str = env!("SPRINGTIDE_VERSION");

const GROUPS: [(&str, &[&str]); 5] = [
    (
        "Run it",
        &[
            "up", "serve", "follow", "ingest", "control", "train", "relay", "world", "demo", "health",
        ],
    ),
    ("Release", &["release", "canary", "policy"]),
    ("Training", &["run", "dataset", "corpus", "rehearse", "tide"]),
    ("Data", &["dlq", "reward"]),
    (
        "Set up",
        &[
            "secrets", "config", "key", "tenant", "audit", "sampler", "erase", "migrate", "stack",
        ],
    ),
];

pub const EXAMPLES: &str = "\
Examples:
  springtide --config demo/completion.toml up --demo     # everything on this machine, with simulated users
  springtide release list                                # which version serves whom
  springtide release rollback --reason \"bad completions\"   # back to the last good version, and stay there
  springtide run create run.json                         # schedule a training run
  springtide policy pull champion ./model                # the served weights as a Hugging Face folder
  springtide dlq list --open                             # records that wait in the dead-letter queue

`springtide COMMAND --help` explains a command.";

/// Clap lists subcommands without groups, so this template lists them itself.
pub fn template() -> String {
    let commands = super::Command::augment_subcommands(clap::Command::new("springtide"));
    let (heading, name_style) = (Style::new().bold().underline(), Style::new().bold());
    let mut groups = String::new();
    for (group, names) in GROUPS {
        let _ = writeln!(groups, "{heading}{group}:{heading:#}"); // writing to a String cannot fail
        for command in names.iter().filter_map(|name| commands.find_subcommand(name)) {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(groups, "  {name_style}{:<9}{name_style:#}{about}", command.get_name());
        }
        groups.push('\n');
    }
    format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{groups}{heading}Options:{heading:#}\n{{options}}\
         {{after-help}}"
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_command_is_in_one_group() {
        let command = crate::cli::Cli::command();
        command.clone().debug_assert();
        let known: BTreeSet<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
        let grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        assert_eq!(grouped.len(), grouped.iter().collect::<BTreeSet<_>>().len());
        assert!(known.iter().all(|name| grouped.contains(name)), "{known:?} {grouped:?}");
        let help = command.clone().render_help().to_string();
        assert!(
            help.contains("Set up:") && help.contains("  release  Show which version"),
            "{help}"
        );
    }

    #[test]
    fn every_command_says_what_it_does() {
        fn check(command: &clap::Command) {
            for command in command.get_subcommands() {
                assert!(command.get_about().is_some(), "{} has no help", command.get_name());
                check(command);
            }
        }
        check(&crate::cli::Cli::command());
    }
}
