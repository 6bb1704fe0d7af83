//! Which users are simulated, and shares of them.

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Users {
    Plain,
    #[default]
    House,
}

impl std::fmt::Display for Users {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Users::Plain => "plain",
            Users::House => "house",
        })
    }
}

/// A share, 0 to 1.
pub fn share(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|error| format!("{error}"))?;
    (0.0..=1.0)
        .contains(&value)
        .then_some(value)
        .ok_or_else(|| "must be from 0 to 1".to_owned())
}
